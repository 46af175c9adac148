"""Makes a release from a commit: `make release`. Everything is made from files of the commit, and twice the same bytes.

commit ─▶ tree ─▶ sdist, pure wheel ─▶ wheels with the compiled request path     (wheels.py, pythons.py)
               ─▶ chart, documentation                                           (archives.py)
wheels ─▶ image                                                                  (image/)
all    ─▶ bills of materials, notes, checksums                                   (materials.py, notes.py, __main__.py)
"""
