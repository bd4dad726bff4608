"""A drafter that can be looked over the shoulder."""

from medusa_cli.drafters.base import Confirmed, Draft


class Watching:
    """Beside a drafter's class, keeps what it was told and what it drafted."""

    seen: list[tuple[Confirmed, Draft]]

    def draft(self, backbone, sequences, confirmed, shape) -> list[Draft]:
        drafts = super().draft(backbone, sequences, confirmed, shape)
        self.seen += zip(confirmed, drafts, strict=True)
        return drafts
