"""The migrations of the database's schema; each module is one of alembic's revisions."""
