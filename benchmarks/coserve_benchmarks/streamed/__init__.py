"""`coserve bench streamed`: a base four times as large as the memory that is allowed."""
