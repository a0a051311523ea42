from serving import play as play
from serving import shared_play as shared_play
