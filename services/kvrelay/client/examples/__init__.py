"""Complete programs to start from. Run one with `python -m kvrelay.client.examples.chat_loop`."""
