package admin

// Routes are the calls of this package.
func Routes() []Route { return (&Server{}).routes() }
