"""The simulator of the first edition, frozen: an oracle for the one that judges plans today.

Never edited to follow a change of the rules in pstar_sim: an oracle that shared them would prove nothing. It shares
data alone (Plan, Step, Workload, Machine, Timeline) and the cost model, whose seconds both take as given. If a field it
reads gets another name, the name is changed here and nothing else.
"""

from first_edition.play import play

__all__ = ["play"]
