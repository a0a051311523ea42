from serving import play as play
