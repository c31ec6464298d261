"""Short common words, for texts without a meaning that a model could know beforehand."""

from __future__ import annotations

_TEXT = """
able acid aged also area army atom aunt away baby back ball band bank barn base bath bean bear beat bell belt bend best
bike bill bird bite blue boat body bold bolt bond bone book boot born boss bowl brow bulk bush busy cabin cage cake calf
calm camp cane cape card care cart case cash cast cave cell chin chip city clan clay clip club coal coat code coil coin
cold cone cook cool cope copy cord core cork corn cost crab crew crop cube cure curl dark data dawn deal dean dear debt
deck deed deep deer desk dial dice diet dirt dish disk dive dock door dose dove down draw drum duck dull dusk dust duty
each earl earn east easy edge else epic even ever exit face fact fair fall fame farm fast fate fear feed feel fern file
film find fine fire firm fish five flag flat flow foam fold folk food foot fork form fort four fowl free frog fuel full
fund gain game gate gear gift girl glad glow glue goal goat gold golf good gown grab gray grey grid grip grow gulf hail
hair half hall hand hang hard harm harp hawk head heap hear heat heel help herb herd hero high hill hint hire hold hole
holy home hood hook hope horn host hour huge hunt idea inch iron item jail jazz join joke jump jury just keen keep kick
kind king kite knee knot lace lady lake lamb lamp land lane last late lawn lead leaf lean left lens lift like lime limp
line link lion list live load loaf loan lock loft logo long look loop lord loss loud love luck lung mail main male mall
"""

WORDS: tuple[str, ...] = tuple(dict.fromkeys(_TEXT.split()))
