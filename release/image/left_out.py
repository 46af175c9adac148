"""What the image leaves out of the packages that it is made of: what serving does not need. All licences stay."""

from typing import Final

PYTHON: Final = "3.13"  # of the Debian release in release/image/root.py
LIBRARY: Final = f"usr/lib/python{PYTHON}"
SITE: Final = f"usr/local/lib/python{PYTHON}/dist-packages"

# Python packages in the lock file that only build the picker.
BUILDS: Final = frozenset(
    """
    ast-serialize editables hatchling librt mypy mypy-extensions pathspec pluggy setuptools tomlkit trove-classifiers
    """.split()  # noqa: SIM905
)
# The library of CEL expressions also has a command of its own, which needs these (epp/plugins/reporters.py).
OF_ITS_COMMAND: Final = frozenset(
    """
    annotated-doc annotated-types markdown-it-py mdurl prompt-toolkit pydantic pydantic-core pygments rich shellingham typer
    typing-inspection wcwidth
    """.split()  # noqa: SIM905
)
# cffi needs it to compile. Of cffi itself, cryptography imports only the compiled part.
OF_CFFI: Final = frozenset({"pycparser"})

_TOP: Final = "boot home media mnt opt srv root usr/games usr/include usr/sbin usr/src var"
_PROGRAMS: Final = "openssl c_rehash debconf* mawk pydoc* pygettext* pdb* py*compile*"
_LIBRARIES: Final = """
    gconv perl* engines-3 ossl-modules libdb-5* libsqlite3* libreadline* libhistory* libform* libmenu* libpanel* libncurses* libtic.*
    libtinfo* libmvec* libBrokenLocale* libc_malloc_debug* libmemusage* libpcprofile* libthread_db* libnss_hesiod*
"""
_SHARED: Final = """
    man locale info lintian zoneinfo perl5 bash-completion binfmts debconf applications pixmaps bug dict gcc gdb initramfs-tools misc
    readline
"""
_STANDARD: Final = """
    config-* ensurepip idlelib pydoc_data sqlite3 test turtle* tkinter dbm curses venv sitecustomize.py _pydecimal.py _pyio.py
    lib-dynload/_sqlite3.* lib-dynload/_dbm.* lib-dynload/_gdbm.* lib-dynload/_curses* lib-dynload/readline.* lib-dynload/_test*
    lib-dynload/_codecs_* lib-dynload/_ctypes_test.* lib-dynload/_xxtestfuzz.* lib-dynload/xx*
    unittest doctest.py pdb.py mailbox.py imaplib.py pickletools.py xmlrpc
"""
_DEPENDENCIES: Final = """
    bin share CHANGELOG.md kubernetes_asyncio/client/models/[!_]* kubernetes_asyncio/client/api/[!_]* kubernetes_asyncio/README.md
    zstandard/_cffi.* numpy/f2py numpy/testing numpy/_pyinstaller numpy/random/lib numpy/_core/lib numpy/_core/_simd.*
    numpy/_core/_*_tests.* numpy/fft numpy/polynomial numpy/random/_examples cffi
    *.dist-info/RECORD *.dist-info/REQUESTED *.dist-info/direct_url.json
"""
# Debian packages of which nothing but a folder is left.
DEBIAN: Final = frozenset(
    """
    debconf libdb5.3t64 libncursesw6 libreadline8t64 libsqlite3-0 libtinfo6 mawk openssl openssl-provider-legacy readline-common tzdata
    """.split()  # noqa: SIM905
)
# Patterns of paths, relative to the root.
PATHS: Final = tuple(
    f"{folder}{name}"
    for folder, names in (
        ("", _TOP),
        ("usr/bin/", _PROGRAMS),
        ("usr/lib/*/", _LIBRARIES),
        ("usr/share/", _SHARED),
        (f"{LIBRARY}/", _STANDARD),
        (f"{SITE}/", _DEPENDENCIES),
        ("usr/share/doc/", " ".join(DEBIAN)),
    )
    for name in names.split()
)
AUTHORITIES: Final = ("certifi/cacert.pem", "grpc/_cython/_credentials/roots.pem")  # Debian's take their place
SOURCES: Final = frozenset({".a", ".c", ".h", ".hpp", ".pxd", ".pxi", ".pyi", ".pyx"})  # suffixes, in dependencies
