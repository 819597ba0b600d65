"""The documentation, and the scripts that generate part of it: `python -m docs.gallery`."""
