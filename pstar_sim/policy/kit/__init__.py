"""What policies are made with: the builder of steps, facts of a job, options, points, capabilities. Knows no policy."""
