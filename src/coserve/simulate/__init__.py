"""The real scheduler on hardware that is modelled: counts of work, tables of hardware, virtual time."""
