"""The demo: conversations stream while two adapters are trained, with all figures measured."""
