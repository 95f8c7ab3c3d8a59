"""The asynchronous family. The queues of its plans run independently of one another, in the order that `choose`
finds."""
