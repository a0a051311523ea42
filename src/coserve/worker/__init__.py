"""The worker owns a device: weights, pages, sessions and the passes of a step. It runs plans and makes no
decisions; `executors/` brings it plans, `opening` makes one for a model."""
