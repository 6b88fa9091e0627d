"""The operators of a decoder, one folder each. They know tensors, blocks and slots; nothing of requests or serving.

Each folder has `reference.py`, plain torch with float32 accumulation: the specification. Faster twins of the same
signature sit beside it (`cpu.py`; later `triton.py`), and `dispatch.ops_for(device)` picks a set.
"""
