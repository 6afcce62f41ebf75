"""Publishing drafters: model cards from measured figures, and uploads to the Hub in one commit."""

from hf_specdec.hub.card import CardFacts, check_card, render_card
from hf_specdec.hub.publish import Upload, prepare_upload


__all__ = ["CardFacts", "Upload", "check_card", "prepare_upload", "render_card"]
