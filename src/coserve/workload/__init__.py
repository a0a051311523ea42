"""Workloads: arrivals, traces, prompts, mixes of requests and jobs, and model shapes."""
