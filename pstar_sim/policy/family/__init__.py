"""The asynchronous family of policies. The queues of its plans run independently of one another, in the order that
`choose` finds.
"""
