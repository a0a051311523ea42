"""The command line (`app.py`). It talks HTTP to a server, and starts one."""
