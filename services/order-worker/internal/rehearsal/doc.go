// Package rehearsal serves what `seckillctl rehearse` needs and nobody else may have: buyers' tokens,
// signed payment callbacks, a broken message, and everything that MySQL and Redis hold of one sale.
//
// Every route refuses an activity that is not a shadow one. The tokens carry the activity's id, and
// order-api takes such a token for that activity only.
package rehearsal
