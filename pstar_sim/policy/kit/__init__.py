"""Parts for policies: facts of a job, schedules, options, points, capabilities. They know no policy and no pass."""
