"""Write the plans and the net of this tree over the kept ones: `python tests/golden/update.py`. Look at the difference
before you commit it: every line that changed is a decision that changed. A commit says why, plan by plan."""

from __future__ import annotations

import net  # beside this file, as plans is
import plans

if __name__ == "__main__":
    for name in plans.JOBS:
        plans.plan(name).check()
        path = plans.HERE / f"{name}.txt"
        new = plans.text(name)
        old = path.read_text(encoding="utf-8") if path.exists() else ""
        path.write_text(new, encoding="utf-8")
        print(f"{path.name}: {'as it was' if new == old else 'changed'}")
    kept = net.load() if net.FILE.exists() else {}
    records = {name: net.record(make()) for name, make in net.jobs().items()}
    for name, record in records.items():
        found = net.differences(kept[name], record) if name in kept else ["is new"]
        if found:
            print(f"{name}: {'; '.join(found)}")
    print(f"net.json: {sum(kept.get(name) != record for name, record in records.items())} of {len(records)} changed")
    net.save(records)
