-- Asks the picker which server a request goes to. Where it does not answer, `balance` decides.
local PICKER = os.getenv("PICKER") or "127.0.0.1:30002"

core.register_action("pick", {"http-req"}, function(txn)
  local told = {["content-type"] = {"application/json"}, ["x-original-path"] = {txn.sf:path()}}
  for _, name in ipairs{"authorization", "x-llm-d-slo-ttft-ms"} do
    if txn.sf:req_fhdr(name) ~= "" then told[name] = {txn.sf:req_fhdr(name)} end
  end
  local url = "http://" .. PICKER .. "/v1/pick"
  local answer = core.httpclient():post{url = url, headers = told, body = txn.sf:req_body(), timeout = 2000}
  if answer.status == 200 then
    txn:set_var("txn.server", answer.body:match('"server": "([^"]*)"'))
    for name, value in answer.body:gmatch('"(x%-[%w-]+)": "([^"]*)"') do
      -- A rank is of the server that was picked, and the request may go on to another.
      if not name:find("dp-rank", 1, true) then txn.http:req_set_header(name, value) end
    end
  elseif answer.headers["retry-after"] then -- the picker's refusal; HAProxy's own errors lack it
    local reply = txn:reply{status = answer.status, body = answer.body}
    reply:add_header("content-type", "application/json")
    reply:add_header("retry-after", answer.headers["retry-after"][0])
    txn:done(reply)
  end
end)
