"""A drafter that can be looked over the shoulder."""

from medusa_cli.drafters.base import Confirmed, Draft


class Watching:
    """Beside a drafter's class, keeps what it was told and what it drafted."""

    seen: list[tuple[Confirmed, Draft]]

    def draft(self, backbone, cache, confirmed, tree) -> Draft:
        draft = super().draft(backbone, cache, confirmed, tree)
        self.seen.append((confirmed, draft))
        return draft
