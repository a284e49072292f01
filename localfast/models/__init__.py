"""Models: what can be had, what is here, what is inside a file, and which ones are loaded."""
