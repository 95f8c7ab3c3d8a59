"""A run, on plan: its state, the contract's table, the plan's steps and moments, reads of user code. Timetable and
cursor decide, and do not know torch; the other parts carry out."""
