"""Parts for policies: facts of a job, schedules, options, points, capabilities. The parts know no policy and no
pass."""
