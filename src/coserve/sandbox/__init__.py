"""Child processes with limits of time and memory, for work on data of tenants and foreign folders."""
