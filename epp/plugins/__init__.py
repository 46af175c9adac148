"""Plugins: one file each, found by walking this folder, so that no file lists them."""
