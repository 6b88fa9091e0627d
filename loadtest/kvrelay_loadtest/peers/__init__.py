"""The engines a user would otherwise pick, each in a virtual environment of its own, driven over JSON lines."""
