"""Plugins, one file each. `epp.config.registry` finds them by walking this folder, so no file lists them.

Plugins of one folder share code in its `__init__` or in a `_module`; they never import each other.
May import: the rows of epp below them. Imported by: epp.config, and workers where they need the type of one plugin.
"""
