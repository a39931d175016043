"""Readers of the data that recipes train on: IDX files, image folders, text pairs, and dates that are made on the spot."""
