"""Write the plans of this tree over the kept ones: `python tests/golden/update.py`. Look at the difference before you
commit it: every line that changed is a decision that changed."""

from __future__ import annotations

import plans  # beside this file

if __name__ == "__main__":
    for name in plans.JOBS:
        plans.plan(name).check()
        path = plans.HERE / f"{name}.txt"
        new = plans.text(name)
        old = path.read_text(encoding="utf-8") if path.exists() else ""
        path.write_text(new, encoding="utf-8")
        print(f"{path.name}: {'as it was' if new == old else 'changed'}")
