"""`coserve bench zoo`: many applications of one foundation, stored as shared blocks."""
