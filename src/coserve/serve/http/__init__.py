"""What surrounds a request, whichever it is: who asks, limits, uploads, streams."""
