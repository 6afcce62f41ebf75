"""Every error this package raises on purpose.

```
SpeculativeError
├── InvalidConfigError       (ValueError)   an option is out of range, unknown, or contradicts another one
├── UnsupportedModelError    (ValueError)   this model, cache or decoding mode cannot be decoded speculatively
├── IncompatibleDraftError   (ValueError)   the drafter does not fit its target (vocabulary, tokenizer)
├── DrafterError             (RuntimeError) a drafter failed in mid-run (exception, NaN, malformed draft)
└── PublishError             (OSError)      the Hub did not answer, or refused an upload
```
"""

__all__ = [
    "DrafterError",
    "IncompatibleDraftError",
    "InvalidConfigError",
    "PublishError",
    "SpeculativeError",
    "UnsupportedModelError",
]


class SpeculativeError(Exception):
    """Base class of every error raised on purpose by `hf_specdec`."""


class InvalidConfigError(SpeculativeError, ValueError):
    """An option is out of range, unknown, or contradicts another one."""


class UnsupportedModelError(SpeculativeError, ValueError):
    """The model, its cache or the decoding mode cannot be decoded speculatively."""


class IncompatibleDraftError(SpeculativeError, ValueError):
    """The drafter does not fit its target."""


class DrafterError(SpeculativeError, RuntimeError):
    """A drafter failed while drafting."""


class PublishError(SpeculativeError, OSError):
    """The Hub did not answer, or refused an upload."""
