"""Memory: pages, caches, budgets, the ledger of who owns which bytes."""
