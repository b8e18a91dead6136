//! Exact attention, one tile at a time, on whichever processor is there.
