"""Lower bounds on the seconds of every schedule of a job, and the certificate with which a plan carries its bound."""
