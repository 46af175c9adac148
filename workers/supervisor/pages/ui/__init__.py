"""The page `/ui` for people: its files, which the browser gets as they are. `docs/live-page.md` describes it.

files       serves the files with a strict Content-Security-Policy
static/     the page: `main.js` starts it, `store.js` follows the state, a module for each view; no build step
static/vendor/   libraries from npm, as published; `python -m tests.ui.vendor` compares them
"""
