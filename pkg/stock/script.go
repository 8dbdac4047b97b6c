package stock

import (
	"context"
	"crypto/sha1" //nolint:gosec // Redis names scripts by their SHA-1
	"encoding/hex"
	"fmt"
	"strconv"

	"github.com/redis/go-redis/v9"

	"seckill/lua"
)

// script is a Lua script and the name Redis knows it by.
type script struct{ source, sha string }

func newScript(source string) script {
	sum := sha1.Sum([]byte(source)) //nolint:gosec // see above
	return script{source: source, sha: hex.EncodeToString(sum[:])}
}

// scripts holds every script of the client.
type scripts struct {
	reserve, confirm, release, park, unpark     script
	paying, refundDue, refundReceipt            script
	announce, warmPrepare, warmOpen, pause, end script
	qualify, addStock                           script
	fence, cleanupRecords, cleanupKeys, settle  script
	repair, rebuildRecords, rebuildWipe         script
}

func loadScripts() scripts {
	return scripts{
		reserve:     newScript(lua.Reserve),
		confirm:     newScript(lua.Confirm),
		release:     newScript(lua.Release),
		park:        newScript(lua.Park),
		unpark:      newScript(lua.Unpark),
		announce:    newScript(lua.Announce),
		warmPrepare: newScript(lua.WarmPrepare),
		warmOpen:    newScript(lua.WarmOpen),
		pause:       newScript(lua.Pause),
		end:         newScript(lua.End),
		qualify:     newScript(lua.Qualify),
		addStock:    newScript(lua.AddStock),

		paying:        newScript(lua.Paying),
		refundDue:     newScript(lua.RefundDue),
		refundReceipt: newScript(lua.RefundReceipt),

		fence:          newScript(lua.Fence),
		cleanupRecords: newScript(lua.CleanupRecords),
		cleanupKeys:    newScript(lua.CleanupKeys),
		settle:         newScript(lua.Settle),

		repair:         newScript(lua.Repair),
		rebuildRecords: newScript(lua.RebuildRecords),
		rebuildWipe:    newScript(lua.RebuildWipe),
	}
}

// scriptCmd is one call of a script, by SHA at first.
type scriptCmd struct {
	*redis.Cmd
	script script
}

// call prepares a script call; submit or exec runs it. No context is kept in it.
func (s script) call(keys []string, args ...string) *scriptCmd {
	texts := make([]string, 0, 3+len(keys)+len(args))
	texts = append(texts, "evalsha", s.sha, strconv.Itoa(len(keys)))
	return s.prepare(append(append(texts, keys...), args...))
}

// prepare makes the command of its complete texts. They are handed over by address: the library
// takes that as it takes strings, and boxing each of them would cost an allocation.
func (s script) prepare(texts []string) *scriptCmd {
	args := make([]any, len(texts))
	for i := range texts {
		args[i] = &texts[i]
	}
	cmd := redis.NewCmd(context.Background(), args...)
	cmd.SetFirstKeyPos(3)
	return &scriptCmd{Cmd: cmd, script: s}
}

// useSource makes the next attempt carry the script itself, for a server that does not know its SHA.
func (s *scriptCmd) useSource() {
	args := s.Args()
	args[0], args[1] = "eval", s.script.source
}

// reply reads what the script returned: an array of texts.
func (s *scriptCmd) reply() ([]string, error) {
	if err := s.Err(); err != nil {
		return nil, err
	}
	return texts(s.Val())
}

// texts reads an array of texts.
func texts(reply any) ([]string, error) {
	list, ok := reply.([]any)
	if !ok || len(list) == 0 {
		return nil, fmt.Errorf("script answered %T", reply)
	}
	out := make([]string, len(list))
	for i, v := range list {
		if out[i], ok = v.(string); !ok {
			return nil, fmt.Errorf("script answered %T at %d", v, i)
		}
	}
	return out, nil
}

// unknownCode is the error for a script answer that this program does not know. It is never taken
// for one of the known ones.
func unknownCode(script string, reply []string) error {
	return fmt.Errorf("%s script answered unknown code %q", script, reply[0])
}

func corrupt(reply []string) error {
	if len(reply) > 1 {
		return fmt.Errorf("%w: %s", ErrCorrupt, reply[1])
	}
	return ErrCorrupt
}
