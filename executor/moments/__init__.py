"""Events of the user's model, counts of its operators, and the recorder that makes a workload of both."""
