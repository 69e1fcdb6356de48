"""One invoice that is posted, and one that is withdrawn."""

from __future__ import annotations

from datetime import date
from decimal import Decimal

from examples.invoices.app import Money, invoice

posted = invoice.run_sync(Money(Decimal("19.90"), "EUR"), date(2026, 3, 1))
print("posted:", posted.result())
print("reminders:", *sorted(posted.actions()[1].result["reminders"]))

withdrawn = invoice.run_sync(Money(Decimal("0.10"), "USD"), date(1999, 12, 31))
print(withdrawn.status)
