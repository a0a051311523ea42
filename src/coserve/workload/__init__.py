"""What a machine is asked to do: arrivals, traces, prompts, mixes of requests and jobs, and model shapes."""
