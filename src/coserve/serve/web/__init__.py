"""What the page needs of the server: its files, logins of browsers, and figures as they change."""
