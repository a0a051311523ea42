"""From a request for text to its answer: checked, priced, queued, followed, shaped."""
