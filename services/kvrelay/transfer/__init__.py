"""One sequence's KV as bytes, from the worker that computed it into the blocks of the worker that reserved them."""
