"""Memory: pages, budgets, the ledger of who owns which bytes."""
