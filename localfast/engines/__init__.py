"""Builds of the native engine, side by side in the user's data folder: which suit this machine, which are there, which is used.

Nothing here imports the engine or changes the Python environment; a build is looked at by a child process only.
"""
