"""The server's side of the page: its files, logins of browsers, and figures as they change."""
