"""The database's shape, one step after another; each module is one of alembic's revisions."""
