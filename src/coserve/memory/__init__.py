"""Memory: pages, budgets, and the ledger of bytes by owner."""
