"""Measures kvrelay: the engine alone, the server under open-loop load, and the peers beside them. See README.md."""
