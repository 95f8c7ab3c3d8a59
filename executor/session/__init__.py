"""A run, on plan. Timetable and cursor decide, and do not know torch; the other parts carry out."""
